"""Statistics of a run in one line."""

from collections.abc import Sequence

from jetspec_jax.engine.output import Completion


def token_count(completions: Sequence[Completion]) -> int:
    """Tokens of all completions."""
    return sum(len(completion.token_ids) for completion in completions)


def figures(completions: Sequence[Completion], seconds: float, *, warm: bool | None = None) -> str:
    """Tokens, rounds and speed of a run of one completion or more; ``warm`` is None if unknown."""
    count, rounds = token_count(completions), sum(completion.rounds for completion in completions)
    committed = sum(sum(completion.accept_lengths) for completion in completions)
    nodes = sum(sum(completion.tree_sizes) for completion in completions)
    several = f" in {len(completions)} completions" if len(completions) > 1 else ""
    if nodes == rounds:
        steps = f"{rounds} plain steps"
    else:
        steps = (
            f"{rounds} rounds, {committed / rounds:.2f} tokens per round from trees of "
            f"{nodes / rounds:.0f} nodes"
        )
    compiling = {None: "", True: " after warm-up", False: " with compiling"}[warm]
    reasons = ", ".join(sorted({completion.finish_reason for completion in completions}))
    return (
        f"{count} tokens{several} in {steps}; {seconds:.2f} s{compiling} ({count / seconds:.1f} tokens/s); "
        f"finished by {reasons}"
    )
