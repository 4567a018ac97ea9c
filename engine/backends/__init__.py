"""Where replies come from: an embedded model, servers, or a script."""
