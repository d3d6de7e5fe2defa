"""Where a token is drawn: beside the logits on their device, or on the host. Pure.

What a device draws by itself needs no host between two steps, so the next step may be decided and
launched while this one runs. The rest depends on what was drawn before, on a grammar, or is asked
about after the fact: it is drawn on the host, with nothing launched behind it.
"""

from common.messages import SamplingParams


def drawn_on_device(params: SamplingParams, index: int) -> bool:
    """Whether output token number `index` may be drawn without the host.

    Greedy, and temperature with filters, may. Grammars, penalties, biases, stop tokens put off by
    `min_tokens`, and reported log probabilities may not.
    """
    return (
        params.grammar is None
        and params.logprobs is None
        and params.repetition_penalty == 1.0
        and not params.presence_penalty
        and not params.frequency_penalty
        and not params.logit_bias
        and index >= params.min_tokens
    )
