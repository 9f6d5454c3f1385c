"""Random plans of groups, for tests of what runs them: any valid plan must train alike."""

import random
from collections.abc import Sequence

from wlb_megatron.dynamic.plan import Group, Stage, StepPlan


def random_plan(tokens: Sequence[int], stage: Stage, seed: int) -> StepPlan:
    """Documents in random order, each in a random micro-step on a random block with room; some ranks stay idle."""
    dice = random.Random(seed)
    steps: list[dict[tuple[int, int], list[int]]] = []
    for document in dice.sample(range(len(tokens)), len(tokens)):
        fitting = [k for k, most in enumerate(stage.tokens) if tokens[document] <= most]
        level = dice.choice(fitting)
        size = stage.sizes[level]
        start = dice.randrange(stage.ranks // size) * size
        for step in [*dice.sample(steps, len(steps)), {}]:
            held = step.get((start, size), [])
            clash = any(
                (start, size) != (other, wide) and start < other + wide and other < start + size
                for other, wide in step
            )
            if not clash and sum(tokens[d] for d in held) + tokens[document] <= stage.tokens[level]:
                step.setdefault((start, size), []).append(document)
                if step not in steps:
                    steps.append(step)
                break
    return StepPlan(
        stage.ranks,
        tuple(
            tuple(Group(start, size, tuple(sorted(step[start, size]))) for start, size in sorted(step))
            for step in steps
        ),
    )
