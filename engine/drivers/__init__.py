"""Episodes of one run in many processes and on many hosts, on Ray."""
