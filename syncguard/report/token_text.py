"""The text of tokens, for people; never used to make ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncguard.errors import BadInputError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def decoder_of(folder: Path) -> Callable[[int], str]:
    """Return a function from a token id to its text, from a `tokenizer.json` in the folder.

    Raises:
        BadInputError: The folder has no readable tokenizer.
        UnsupportedError: The `tokenizers` package is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UnsupportedError("texts of tokens", expected="the tokenizers package", found=error) from error
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises plain Exception
        raise BadInputError("cannot read a tokenizer", expected="tokenizer.json", found=error, where=folder) from error

    def decode(token_id: int) -> str:
        return str(tokenizer.decode([token_id], skip_special_tokens=False)) or str(
            tokenizer.id_to_token(token_id) or ""
        )

    return decode
