"""What a state does: one small file for each action."""
