"""Episodes as a service over HTTP, for programs in other processes."""
