"""Setup, tests, the main job and checks of the project; benchmarks are in scripts/bench, the paper's tables in
scripts/reproduce. Not installed."""
