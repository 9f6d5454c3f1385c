"""`wlb-megatron patch`: the plugin's calls put into a fork of Megatron-LM, taken out again, or looked for.

`git` does the work and does it whole or not at all: patches given to it together are applied together. A patch has one
line of context, the line that its own follow, so that it fits whatever a fork has changed around that line.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from wlb_megatron.errors import WlbError

PACKAGE = Path(__file__).resolve().parent
VERSION_FILE = Path("megatron/core/package_info.py")

APPLY = ("apply", "--unidiff-zero")
"""Without the flag, git takes a hunk with no context below for the end of the file."""


@dataclass(frozen=True, slots=True)
class State:
    """A patch and its state in a checkout.

    merged: its lines are there, but between others (merged by hand), so git cannot remove them. differs: git's
    message if it neither applies nor is applied.
    """

    patch: Path
    applied: bool
    merged: bool = False
    differs: tuple[str, ...] = ()


def add_patch(parser: argparse.ArgumentParser) -> None:
    """Flags of `wlb-megatron patch`."""
    parser.description = (
        "Patches a fork of Megatron-LM so that its own scripts start with the plugin. All patches are applied or "
        "none, and applying them again does nothing."
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument(
        "--check", action="store_true", help="print what is applied, and what --apply would do"
    )
    action.add_argument("--apply", action="store_true", help="apply what is not applied yet")
    action.add_argument("--revert", action="store_true", help="remove what is applied")
    parser.add_argument("path", metavar="PATH", type=Path, help="the checkout")
    parser.set_defaults(run=run_patch)


def run_patch(args: argparse.Namespace) -> None:
    """Prints what was done, one line per patch. WlbError, with nothing changed, if the fork differs."""
    version = checkout_version(args.path)
    states = [state_of(args.path, patch) for patch in patches_of(version)]
    differing = [state for state in states if state.differs or (state.merged and args.revert)]
    if differing:
        raise WlbError("\n".join(_explain(args.path, version, state) for state in differing))
    todo = [state.patch for state in states if state.applied == args.revert]
    if not args.check and todo:
        git_apply(args.path, todo, reverse=args.revert)
    for state in states:
        if args.check:
            outcome = ("merged by hand" if state.merged else "applied") if state.applied else "can be applied"
        elif state.patch in todo:
            outcome = "reverted" if args.revert else "applied"
        else:
            outcome = "was not applied" if args.revert else "was applied already"
        on = tried_on(state.patch)
        print(f"megatron-core {version}: {state.patch.name} (tried on {on[0]} to {on[-1]}) {outcome}")


def checkout_version(checkout: Path) -> str:
    """megatron-core's version in a checkout, read from its source without running it. WlbError if there is none."""
    try:
        text = (checkout / VERSION_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WlbError(
            f"{checkout} is no Megatron-LM checkout, {VERSION_FILE} cannot be read ({error}); give its root folder"
        ) from None
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) *= *(\d+)", text, re.MULTILINE))
    if len(numbers) < 3:
        raise WlbError(
            f"{checkout / VERSION_FILE} names no MAJOR, MINOR and PATCH; give a Megatron-LM checkout"
        )
    return ".".join(str(int(numbers[name])) for name in ("MAJOR", "MINOR", "PATCH"))


def patches_of(version: str) -> list[Path]:
    """The patches, in order, for a version at least as new as the oldest tested one. WlbError for an older one.

    A newer version is not refused: if its files differ, git says so and changes nothing.
    """
    root = next(
        (folder for folder in (PACKAGE / "patches", PACKAGE.parent / "patches") if folder.is_dir()), None
    )
    paths = sorted(root.glob("*.patch")) if root else []
    if not paths:
        raise WlbError(
            "this installation has no patches; install it again, or start with -m wlb_megatron.launch"
        )
    oldest = tried_on(paths[0])[0]
    if _numbers(version)[:2] < _numbers(oldest)[:2]:
        raise WlbError(
            f"no patches for megatron-core {version}, which is older than {oldest}: check out core_r0.16.0 or a "
            "later branch"
        )
    return paths


def tried_on(patch: Path) -> list[str]:
    """The versions of megatron-core that a patch was applied to and reverted from, oldest first."""
    (line,) = re.findall(r"^Tried on megatron-core (.+)$", patch.read_text(encoding="utf-8"), re.MULTILINE)
    return line.split(", ")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


def state_of(checkout: Path, patch: Path) -> State:
    """Whether a patch is applied, can be applied, or neither."""
    # Applied first: its anchor stays in a patched file, so that it can always be applied again.
    if _git(checkout, [*APPLY, "--check", "--reverse", str(patch)]).returncode == 0:
        return State(patch, applied=True)
    if _holds(checkout, patch):
        return State(patch, applied=True, merged=True)
    forward = _git(checkout, [*APPLY, "--check", "--verbose", str(patch)])
    if forward.returncode == 0:
        return State(patch, applied=False)
    errors = [
        line.removeprefix("error: ") for line in forward.stderr.splitlines() if line.startswith("error: ")
    ]
    messages = tuple(line for line in errors if not line.startswith("while searching"))
    return State(patch, applied=False, differs=messages or (forward.stderr.strip(),))


def _holds(checkout: Path, patch: Path) -> bool:
    """Whether the file has the patch's added lines, consecutively, and no conflict left."""
    (name,) = re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(encoding="utf-8"), flags=re.MULTILINE)
    added = "\n".join(line[1:] for line in hunks(patch) if line.startswith("+"))
    try:
        text = (checkout / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return added in text and "\n<<<<<<< " not in text


def git_apply(checkout: Path, patches: list[Path], *, reverse: bool = False) -> None:
    """Apply patches together, or take them out in the other order. WlbError with git's words if it cannot."""
    ordered = [str(patch) for patch in (reversed(patches) if reverse else patches)]
    result = _git(checkout, [*APPLY, *(["--reverse"] if reverse else []), *ordered])
    if result.returncode:
        raise WlbError(f"git changed nothing in {checkout}: {result.stderr.strip()}")


def _git(checkout: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    # A repository around the checkout is not looked at: git would skip files outside of what it tracks there.
    environment = {"GIT_CEILING_DIRECTORIES": str(checkout.resolve().parent), "LC_ALL": "C"}
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=checkout,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise WlbError("git is needed to patch a checkout and was not found: install it") from None


def _explain(checkout: Path, version: str, state: State) -> str:
    """Which hunk does not fit, with its lines, and how to merge it by hand."""
    here, patch = shlex.quote(str(checkout)), shlex.quote(str(state.patch))
    if state.merged:
        return (
            f"{state.patch.name} was merged by hand, so its lines are to be taken out by hand as well; nothing was "
            f"changed. Or try: git -C {here} {' '.join(APPLY)} --3way --reverse {patch}"
        )
    lines = [f"{state.patch.name} does not fit this fork of megatron-core {version}; nothing was changed."]
    lines += [f"  {message}" for message in state.differs]
    lines += [f"  | {line}" for line in hunks(state.patch)]
    lines += [
        "  Merge it three-way (conflicts are marked in the file), then run this again:",
        f"    git -C {here} {' '.join(APPLY)} --3way {patch}",
        "  It needs Megatron-LM's history (git fetch --unshallow). Without it, add the lines with + by hand.",
    ]
    return "\n".join(lines)


def hunks(patch: Path) -> list[str]:
    """The hunks of a patch, from their @@ lines on, without its header."""
    text = patch.read_text(encoding="utf-8")
    return re.split(r"^(?=@@ )", text, maxsplit=1, flags=re.MULTILINE)[1].splitlines()
