"""Tools that specs may name: one file per tool."""
