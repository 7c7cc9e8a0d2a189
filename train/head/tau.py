"""τ of decoded held-out prompts: tokens committed per round, by budget, temperature and source."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jetspec_jax.request_output import RequestOutput
from train.loop.log import TAU_BY_SOURCE

#: Completions of the held-out prompts, in their order, by temperature and by budget.
Decoded = Mapping[float, Mapping[int, Sequence[RequestOutput]]]


def mean_tau(completions: Sequence[RequestOutput]) -> float:
    """Mean tokens committed per round, over all rounds of all completions."""
    lengths = [length for completion in completions for length in completion.accept_lengths]
    return round(float(np.mean(lengths)), 4) if lengths else 1.0


def tau_record(decoded: Decoded, sources: Sequence[str]) -> dict[str, Any]:
    """τ of all prompts, and of the prompts of each source.

    Returns:
        "tau" by budget at the first temperature, "tau_by_temperature" by temperature and budget, and
        "tau_by_source" by source, temperature and budget. All keys are texts.
    """
    by_temperature = by_budget(decoded, range(len(sources)))
    return {
        "tau": next(iter(by_temperature.values())),
        "tau_by_temperature": by_temperature,
        TAU_BY_SOURCE: {
            source: by_budget(decoded, [i for i, origin in enumerate(sources) if origin == source])
            for source in dict.fromkeys(sources)
        },
    }


def by_budget(decoded: Decoded, prompts: Sequence[int]) -> dict[str, dict[str, float]]:
    """τ of some prompts by temperature and budget."""
    return {
        str(float(temperature)): {
            str(budget): mean_tau([completions[i] for i in prompts])
            for budget, completions in budgets.items()
        }
        for temperature, budgets in decoded.items()
    }
