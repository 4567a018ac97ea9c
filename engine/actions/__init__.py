"""The actions of states: one file per action."""
