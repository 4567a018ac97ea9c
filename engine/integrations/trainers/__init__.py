"""Other trainers: what each carries of a spec (`capabilities.py`), and what a spec uses (`check.py`)."""
