"""Work on stored runs: retries, forks, dropped episodes, smaller files."""
