"""Other trainers: what each carries of a spec (`capabilities.py`), what a spec uses (`check.py`), and what all adapters share: groups of
episodes (`rollouts.py`), rows and sums of the hand-over (`handover.py`), a loop in a thread (`loop.py`)."""
