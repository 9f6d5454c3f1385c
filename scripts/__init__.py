"""Setup, tests, the main job and checks of the project; benchmarks are in scripts/bench. Not installed."""
