"""Strings that are no text, told apart before a tokenizer meets them."""


def check_text(text: object, name: str) -> str:
    """``text`` as it is. Raises ValueError, naming ``name``, for what is no string, and for a
    string with a lone surrogate, which is no character: JSON may hold one, and Python puts one in
    place of each wrong byte of a command line.
    """
    if not isinstance(text, str):
        raise ValueError(f"{name} is {text!r:.80}, expected a text")
    try:
        text.encode()
    except UnicodeEncodeError as reason:
        raise ValueError(f"{name} is no valid text: {reason}") from reason
    return text
