"""Options that several commands share, written down once: a dataclass of options is one parameter of a command."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer takes it: each parameter that is a dataclass becomes its fields, an option each.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Place:
        ...     device: str = "cpu"
        >>> def train(epochs: int, place: Place) -> None: ...
        >>> list(inspect.signature(with_groups(train)).parameters)
        ['epochs', 'device']
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)}
    options: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        group = groups.get(name)
        if group is None:
            options.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
        else:
            own = get_type_hints(group, include_extras=True)
            options += [
                inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=own[f.name])
                for f in fields(group)
            ]

    @wraps(command)
    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
        command(**given)

    call.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    call.__annotations__ = {option.name: option.annotation for option in options}
    return call
