"""The table of what `make test` leaves out names tests that are there."""

import ast
from pathlib import Path

from tests.exhaustive import QUICK_CASES

TESTS = Path(__file__).resolve().parent


def test_every_name_in_the_table_is_a_test():
    there = {}
    for name in QUICK_CASES:
        path, function = name.split("::")
        if path not in there:
            body = ast.parse((TESTS / path).read_text(encoding="utf-8")).body
            there[path] = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        assert function in there[path], name
