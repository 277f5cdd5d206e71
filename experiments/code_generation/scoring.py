"""Judges whether a line by itself, and a function with its completion, are code."""

import ast
import warnings

# What a line may need around it to be a whole statement: a block, what it belongs to, or a definition behind it.
_AROUND = (
    "{line}",
    "{line}\n    pass",
    "if _:\n    pass\n{line}\n    pass",
    "try:\n    pass\n{line}\n    pass",
    "match _:\n    {line}\n        pass",
    "{line}\ndef _(): pass",
)


def line_parses(line: str) -> bool:
    """Returns whether a line, at any indentation, is a statement or the head of a block. Blank lines, comments, and
    lines that continue in the next one do not count."""
    line = line.strip()
    if not line or line.startswith("#"):
        return False
    return any(_tree(around.format_map({"line": line})) is not None for around in _AROUND)


def next_line_of(generated: str) -> str | None:
    """Returns the first generated line that is not blank; None if no line is complete."""
    return next((line for line in _whole_lines(generated) if line.strip()), None)


def completion_of(begun: str, generated: str) -> str:
    """Returns the part of the generated text that belongs to the function `begun`: whole lines, up to the first that is
    indented no more than its head."""
    kept = []
    for line in _whole_lines(generated):
        if line.strip() and _indentation(line) <= _indentation(begun):
            break
        kept.append(line + "\n")
    return "".join(kept)


def function_parses(begun: str, completion: str) -> bool:
    """Returns whether both parts are one function, with at least one new line of code."""
    return _has_code(completion) and _tree(_whole(begun, completion)) is not None


def function_compiles(begun: str, completion: str) -> bool:
    """Returns the same by Python's compiler, which also refuses `break` outside of loops, for example."""
    if not function_parses(begun, completion):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(_whole(begun, completion), "<completion>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _whole(begun: str, completion: str) -> str:
    # A method is indented, so it needs a class.
    return ("class _:\n" if _indentation(begun) else "") + begun + completion


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _whole_lines(text: str) -> list[str]:
    return text.split("\n")[:-1]


def _has_code(completion: str) -> bool:
    return any(line.strip() and not line.strip().startswith("#") for line in completion.splitlines())


def _tree(text: str) -> ast.AST | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
