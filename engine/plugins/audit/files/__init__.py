"""Files of rows from strangers, opened without executing anything in them."""
