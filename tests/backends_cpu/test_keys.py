"""The names by which compiled code is kept: what an operation is made of is in its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from checkout import SOURCE


def operations() -> Iterator[tuple[str, ast.FunctionDef, ast.expr]]:
    """Yield the functions that make an operation, and what they name it."""
    for path in sorted((SOURCE / "gemmule").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                for call in ast.walk(node):
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == "operation":
                        yield f"{path.stem}.{node.name}", node, call.args[0]


def words_of(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


OPERATIONS = list(operations())


@pytest.mark.parametrize(
    ("function", "name"),
    [(function, name) for _, function, name in OPERATIONS],
    ids=[place for place, _, _ in OPERATIONS],
)
def test_an_operation_is_named_by_all_that_it_is_made_of(
    function: ast.FunctionDef, name: ast.expr
) -> None:
    """Two of one name are one to the kernels on disk: a second would run the first one's code."""
    given = function.args
    parts = {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)} - {"emit"}
    told = words_of(name)
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and told & set().union(*map(words_of, node.targets)):
            told |= words_of(node.value)
    assert parts <= told, f"{sorted(parts - told)} of {function.name}"
    assert len(OPERATIONS) > 50
