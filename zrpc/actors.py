"""Actors: classes whose instances run one call at a time, or as many as they say.

The decorators mark a class, and change nothing else of it: in its own process it is an ordinary
class. What the marks mean is in `zrpc.services.actors`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import GenericAlias
from typing import Any, Generic, NamedTuple, TypeVar, overload

from zrpc.errors import OptionError

T = TypeVar("T")
C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = "__zrpc_actor__"
_BESIDE = "__zrpc_concurrent__"
# The types of generic classes with parameters, such as Queue[int], which make what the class makes.
_ALIASES = (type(Generic[T]), GenericAlias)  # type: ignore[index]


class ActorLabel(NamedTuple):
    """What workers that call an actor know of it. As a string it is for messages to people.

    Attributes:
        title: the name of the class.
        name: the actor's own; empty if it has none.
        restarts: whether the worker that made it makes it again.
    """

    title: str
    name: str = ""
    restarts: bool = False

    def __str__(self) -> str:
        return f"{self.title} {self.name!r}" if self.name else self.title


@dataclass(frozen=True)
class ActorOptions:
    """How the instances of a class run their calls.

    Attributes:
        concurrency: how many calls run at once.
        restarts: whether the worker that has made one makes it again.
        title: the name of the class.
        beside: how many calls of a method run at once beside the others, by its name; 0 means no
            limit.
    """

    concurrency: int
    restarts: bool
    title: str
    beside: Mapping[str, int]


class ActorClass(Generic[T]):
    """A class with the options of its instances as actors. To call it is to call the class.

    It is what a worker sends to the one that makes an actor, which may not know of the mark.
    """

    def __init__(self, cls: Callable[..., T], concurrency: int, restart: bool) -> None:
        self.cls = cls
        self.__name__ = getattr(cls, "__name__", type(cls).__name__)
        self.__qualname__ = getattr(cls, "__qualname__", self.__name__)
        self.__module__ = getattr(cls, "__module__", __name__)
        setattr(self, _OPTIONS, (concurrency, restart))

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        """Makes an instance of the class."""
        return self.cls(*args, **kwargs)

    def __reduce__(self) -> Any:
        return ActorClass, (self.cls, *getattr(self, _OPTIONS))

    def __repr__(self) -> str:
        return f"<actor class {self.__qualname__}>"


@overload
def actor(cls: type[T], *, concurrency: int = ..., restart: bool = ...) -> type[T]: ...
@overload
def actor(*, concurrency: int = ..., restart: bool = ...) -> Callable[[C], C]: ...
def actor(cls: Any = None, *, concurrency: int | None = None, restart: bool | None = None) -> Any:
    """Makes the instances of a class actors: by default they run one call at a time.

    It is a decorator. An instance that `zrpc.remote` or ``RRef`` has made then begins the calls of
    each worker in the order in which that worker made them. A call that waits takes no thread.
    Subclasses inherit the mark. In its own process the class stays as it is.

    With a class of somebody else, ``actor(Class, concurrency=4)`` returns what `zrpc.remote` takes
    in its place; that class itself is not marked.

    Args:
        cls: the class.
        concurrency: how many calls run at once, in threads or, for ``async def`` methods, by
            turns at each ``await``. Default: 1, also across the ``await`` of a method.
        restart: whether the worker that made an actor makes it again, with the same arguments, if
            the actor's worker dies and another one joins under its name. Default: False. See
            :doc:`/how-to/actors`.

    Raises:
        ValueError: ``concurrency`` is not a positive number.
        TypeError: ``cls`` is not a class.

    May be called in any thread, before or after ``init_rpc``.

    Example:
        >>> import zrpc
        >>> @zrpc.actor
        ... class Counter:
        ...     def __init__(self):
        ...         self.count = 0
        ...     def add(self, number):
        ...         self.count += number
        ...         return self.count
        >>> counter = remote("worker1", Counter)
        >>> counter.rpc_sync().add(2), counter.rpc_sync().add(3)
        (2, 5)
        >>> pool = remote("worker1", zrpc.actor(dict, concurrency=4))
        >>> pool.rpc_sync().get("key", 1)
        1
    """
    if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
        raise OptionError(
            f"expected a concurrency of 1 or more, how many calls an actor runs at once, got "
            f"{concurrency!r}"
        )
    marks = (concurrency or 1, bool(restart))
    if cls is None:
        return lambda decorated: _marked(decorated, marks)
    if concurrency is None and restart is None:
        return _marked(cls, marks)
    _check_class(cls)
    return ActorClass(cls, *marks)


def _marked(cls: Any, marks: tuple[int, bool]) -> Any:
    _check_class(cls)
    try:
        setattr(cls, _OPTIONS, marks)
    except TypeError:  # a class that is written in C
        return ActorClass(cls, *marks)
    return cls


def _check_class(cls: object) -> None:
    if not isinstance(cls, type):
        raise TypeError(f"expected a class to make an actor of, got {cls!r}")


@overload
def concurrent(method: F) -> F: ...
@overload
def concurrent(method: int) -> Callable[[F], F]: ...
def concurrent(method: Any) -> Any:
    """Lets calls of an actor's method begin at once, beside the others and outside of their order.

    It is a decorator. ``@concurrent(4)`` lets at most four calls of the method run at once.

    Args:
        method: the method; or how many calls of it may run at once.

    Raises:
        ValueError: the number is not positive.

    Example:
        >>> import zrpc
        >>> @zrpc.actor
        ... class Replay:
        ...     def __init__(self):
        ...         self.items = []
        ...     @zrpc.concurrent
        ...     def size(self):
        ...         return len(self.items)
        >>> remote("worker1", Replay).rpc_sync().size()
        0
    """
    if type(method) is not int:
        return _marked_beside(method, 0)
    if method < 1:
        raise OptionError(f"expected how many calls of a method run at once, got {method}")
    return lambda decorated: _marked_beside(decorated, method)


def _marked_beside(method: Any, limit: int) -> Any:
    function = getattr(method, "__func__", method)
    if not callable(function):
        raise TypeError(f"expected a method to run beside the others, or a number, got {method!r}")
    setattr(function, _BESIDE, limit)
    return method


def options_of(cls: Any, instance: Any = None) -> ActorOptions | None:
    """Returns the options of an actor that a callable makes; None if it makes no actor.

    Args:
        cls: a class, or something else that can be called.
        instance: what it has made, whose own class counts too.
    """
    found = _mark(cls) or (None if instance is None else _mark(type(instance)))
    if found is None:
        return None
    made = _class_of(type(instance) if instance is not None else getattr(cls, "cls", cls))
    return ActorOptions(*found, getattr(made, "__name__", str(made)), _methods_beside(made))


def as_actor_class(function: Any) -> Any:
    """Returns what to send in place of a marked class: its mark goes with it. Others stay."""
    marks = _mark(function)
    if marks is None or type(function) is ActorClass:
        return function
    return ActorClass(function, *marks)


def _class_of(cls: Any) -> Any:
    """Returns the class itself in place of one with parameters, such as ``Queue[int]``."""
    return cls.__origin__ if isinstance(cls, _ALIASES) else cls


def _mark(cls: Any) -> tuple[int, bool] | None:
    cls = _class_of(cls)
    # Not by getattr: an instance of a marked class may be called, too, and makes no actor.
    if isinstance(cls, type) or type(cls) is ActorClass:
        found: tuple[int, bool] | None = getattr(cls, _OPTIONS, None)
        return found
    return None


def _methods_beside(cls: Any) -> dict[str, int]:
    found = {}
    for name in dir(cls):
        method = inspect.getattr_static(cls, name, None)
        limit = getattr(getattr(method, "__func__", method), _BESIDE, None)
        if type(limit) is int:
            found[name] = limit
    return found
