"""The families' activations, each as it is published, in whatever precision it is given."""

import numpy as np

from pallas_kernels.activation import GELU_TANH, SILU, Activation

# Limits that bind.
GPT_OSS, STEP = Activation.gpt_oss(limit=1.5), Activation.step(0.5)


def _sigmoid(x):
    return np.exp(-np.logaddexp(0, -x))


def _silu(gate, up):
    return gate * _sigmoid(gate) * up


def _gelu_tanh(gate, up):
    # 1 + tanh z would cancel where a gate closes.
    z = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return gate * np.exp(z - np.logaddexp(z, -z)) * up


def _gpt_oss(gate, up):
    gate, up = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5)
    return (up + 1) * gate * _sigmoid(1.702 * gate)


def _step(gate, up):
    return np.minimum(gate * _sigmoid(gate), 0.5) * np.clip(up, -0.5, 0.5)


#: By activation: a function of the gate and the other half.
FORMULAS = {SILU: _silu, GELU_TANH: _gelu_tanh, GPT_OSS: _gpt_oss, STEP: _step}
NAMES = {SILU: "silu", GELU_TANH: "gelu_tanh", GPT_OSS: "gpt_oss", STEP: "step"}
