"""Notices of runs, evaluations and trainings."""
