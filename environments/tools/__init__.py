"""Tools that specs may name: one file a tool."""
