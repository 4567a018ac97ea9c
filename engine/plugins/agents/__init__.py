"""Agent programs: unmodified programs that speak to a model API, whose requests are the turns of an episode."""
