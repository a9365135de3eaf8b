"""Teacher-forced decode in an SGLang rank: the sampler's choice is replaced by the saved id, everything else is the engine's.

Without it SGLang 0.5.23 cannot do this: `logit_bias` is one for all steps and changes the scores, a custom logit processor
changes them too and arrives as pickled code, and `max_new_tokens=1` per token runs the extend kernel instead of decode.
Here the forward, the cache, the sampling maths and the score's extraction are those of generation; only the ids that come
out of the sampler are written over, before the engine reads their scores.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

SAMPLERS: Final = (
    "sglang.srt.layers.sampler.Sampler._sample_from_probs",
    "sglang.srt.layers.sampler.Sampler._sample_from_logprobs",
)
"""Where ids are drawn and their scores not yet taken (`layers/sampler.py`, 0.5.23); both have the positions third."""


class ForcedResponse:
    """The saved response of one rank process; does nothing until it is armed.

    Attributes:
        forced: Tokens put in place of sampled ones since it was armed.
        error: Why a token could not be forced; empty where all could.
    """

    def __init__(self) -> None:
        """Start unarmed."""
        self.forced = 0
        self.error = ""
        self._ids: tuple[int, ...] = ()
        self._prompt_length = 0

    def arm(self, response_ids: Sequence[int], prompt_length: int) -> None:
        """Force these ids from the position after the prompt on."""
        self.forced, self.error = 0, ""
        self._ids, self._prompt_length = tuple(response_ids), prompt_length

    def disarm(self) -> None:
        """Let the sampler choose again."""
        self._ids = ()

    def on_sample(
        self, original: Any, sampler: Any, scores: Any, info: Any, positions: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Sample as always, then write the saved id over the drawn one; an AROUND hook of `SAMPLERS`."""
        result = original(sampler, scores, info, positions, *args, **kwargs)
        if self._ids:
            try:
                self._force(result[0] if isinstance(result, tuple) else result, positions)
            except Exception as error:  # raised, it would end the scheduler
                logger.exception("syncguard could not force a token")
                self.error = f"{type(error).__name__}: {error}"
        return result

    def _force(self, chosen: Any, positions: Any) -> None:
        if chosen.numel() != 1:
            self.error = f"{chosen.numel()} requests in one batch; the server is not idle"
            return
        index = int(positions.reshape(-1)[0]) + 1 - self._prompt_length
        if 0 <= index < len(self._ids):
            chosen.fill_(self._ids[index])
            self.forced += 1
        else:
            self.error = (
                f"a request at position {index + self._prompt_length - 1} is another one; the server is not idle"
            )
