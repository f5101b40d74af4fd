"""Attention within the documents of a row in JAX: laid out as [B, longest] and back, all sizes known beforehand."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from harness import Parts


def by_document(parts: Parts, x_1T2: Any) -> Parts:
    """Let tokens stand where they are in their document, and attend to it alone."""
    attended = parts.attend
    at_T = x_1T2[0, :, 1]
    tokens, longest = len(at_T), min(len(at_T), parts.shape.tokens)
    starts_B = jnp.nonzero(at_T == 0, size=parts.shape.batch, fill_value=tokens)[0]
    from_BS = jnp.minimum(starts_B[:, None] + jnp.arange(longest), tokens - 1)
    document_T, place_T = jnp.cumsum(at_T == 0) - 1, jnp.maximum(at_T, 0)

    def attend(parts: Parts, q_1THK: Any, k_1TGK: Any, v_1TGK: Any) -> Any:
        # What follows a document is the next one's: later keys, which none of its queries sees.
        y_BSHK = attended(parts, *(each[0][from_BS] for each in (q_1THK, k_1TGK, v_1TGK)))
        return y_BSHK[document_T, place_T][None]

    def positions(parts: Parts, tokens: int) -> Any:
        return place_T

    return replace(parts, attend=attend, positions=positions)
