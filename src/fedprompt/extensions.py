"""Tables of names that others can add to: methods, aggregation rules, image sources, partitions, backbones, engines.

There are two ways to add to a table. A package offers a module under the table's entry point group in its `pyproject.toml`. A single
file is given by `--plugin FILE.py`, or by the environment variable FEDPROMPT_PLUGINS, which the processes of a run inherit:
paths, with the system's separator between them. Importing either must register something. Nothing is ever imported because
a config or a run file asks for it.

Free of torch and below every room: settings and methods, data and backbones all may import it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from fedprompt.errors import ConfigError, FedpromptError, broken, did_you_mean, same_name

PLUGINS = "FEDPROMPT_PLUGINS"
OPTION = "--plugin"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_MODULE = "fedprompt_plugin_"  # first part of the names of modules made from plugin files

Thing = TypeVar("Thing")
Decorated = TypeVar("Decorated")
_loaded_groups: set[str] = set()


class Registry(Generic[Thing]):
    """Things by name, for one setting that names one of them."""

    registrations: ClassVar[int] = 0  # in all tables of this process

    def __init__(
        self,
        field: str,
        group: str,
        home: str,
        builtin: Sequence[str] = (),
        words: Sequence[str] = (),
        check: Callable[[str, Any], None] | None = None,
    ) -> None:
        """`home` is the module or package that registers our own things when it is imported.

        If their names are given in `builtin`, it is imported only to get one of them. `words` are values of the setting
        that stand for something else; they cannot be registered. `check` raises where a thing is not of the right kind.
        """
        self.field, self.group, self._home, self._check = field, group, home, check
        self.fixed = (*words, *builtin)
        self.words = frozenset(words)
        self._table: dict[str, Thing] = {}
        self._earlier: dict[str, str] = {}  # earlier name -> name of today
        self._at_home = False

    def registrar(self, name: str, formerly: str | None = None) -> Callable[[Decorated], Decorated]:
        """A decorator that adds what stands below it; `formerly` is a name it had before, which is still accepted."""

        def add(thing: Decorated) -> Decorated:
            self.add(name, thing)
            if formerly is not None:
                self._earlier[formerly] = name
            return thing

        return add

    def add(self, name: str, thing: Any) -> None:
        """Add a thing under a name that nothing else has."""
        if not NAME.fullmatch(name):
            raise ConfigError(broken(self.field, "be registered as letters, digits and any of . _ + -", name))
        held = self._table.get(name)
        if name in self._earlier:
            rule = f"not be registered as the earlier name of {self._earlier[name]!r}"
            raise ConfigError(broken(self.field, rule, name))
        if name in self.words:
            raise ConfigError(broken(self.field, f"not be one of {', '.join(self.words)}, which have a meaning", name))
        if not callable(thing) or not hasattr(thing, "__qualname__"):
            raise ConfigError(broken(f"{self.field} {name!r}", "be a function or a class", thing))
        if held is not None and _identity(held) != _identity(thing):
            raise ConfigError(
                f"{self.field} must be registered once, got {name!r} from {_origin(held)} and {_origin(thing)}"
            )
        if self._check is not None:
            self._check(name, thing)
        self._table[name] = thing
        Registry.registrations += 1

    def table(self) -> dict[str, Thing]:
        """Everything there is, by name in alphabetical order."""
        self._load_home()
        self._load_others()
        return dict(sorted(self._table.items()))

    def others(self) -> dict[str, Thing]:
        """What other packages and plugin files have added."""
        self._load_others()
        return {name: thing for name, thing in sorted(self._table.items()) if name not in self.fixed}

    def names(self) -> list[str]:
        """All values the setting may have: those of this package in their given order, then those of others."""
        return [*self.fixed, *self.others()] if self.fixed else list(self.table())

    def __contains__(self, name: str) -> bool:
        return name in self.fixed or name in self._table or name in self.names()

    def spelled(self, name: str) -> str | None:
        """The name as it is registered, which may differ in case; None where nothing has it."""
        return name if name in self else same_name(name, self.names())

    def current(self, name: str) -> str:
        """The current name of something that was renamed or is spelled in another case; any other is returned unchanged."""
        self._load_home()
        name = self._earlier.get(name, name)
        return self.spelled(name) or name

    def get(self, name: str) -> Thing:
        """The thing of this name or earlier name. Other packages are loaded only if this package has none."""
        name = self.current(name)
        if name not in self._table:
            self._load_others()
        if name not in self._table:
            raise ConfigError(broken(self.field, self.rule(), name) + did_you_mean(name, self.names()))
        return self._table[name]

    def rule(self) -> str:
        """The rule of the setting, for messages."""
        return f"be one of {', '.join(self.names())}"

    def _load_home(self) -> None:
        if self._at_home:
            return
        self._at_home = True
        home = importlib.import_module(self._home)
        if hasattr(home, "__path__"):
            for module in pkgutil.walk_packages(home.__path__, f"{self._home}."):
                importlib.import_module(module.name)

    def _load_others(self) -> None:
        _load_group(self.group)
        load_plugins()


def summary(thing: Any) -> str:
    """The first line of its docstring."""
    return (thing.__doc__ or "").strip().partition("\n")[0]


def _identity(thing: Any) -> tuple[str, str]:
    return thing.__module__, thing.__qualname__


def _origin(thing: Any) -> str:
    """The origin of a thing: its module, or the plugin file."""
    name = str(thing.__module__)
    return str(sys.modules[name].__file__) if name.startswith(_MODULE) else name


def _load_group(group: str) -> None:
    """Import what other packages offer under an entry point group, once."""
    if group in _loaded_groups:
        return
    _loaded_groups.add(group)  # first: what is imported may ask for a name itself
    try:
        for entry in entry_points(group=group):
            try:
                entry.load()
            except FedpromptError:
                raise
            except Exception as error:
                raise ConfigError(f"entry point {entry.name!r} of group {group!r} cannot be loaded: {error}") from error
    except ConfigError:
        _loaded_groups.discard(group)
        raise


def add_plugins(paths: Iterable[Path]) -> None:
    """Load plugin files, also in the processes that this one starts."""
    places = [_place(path) for path in paths]
    for place in places:
        if os.pathsep in str(place):
            raise ConfigError(broken(OPTION, f"have no {os.pathsep!r} in its path", str(place)))
        _load_file(place, OPTION)
    known = [each for each in os.environ.get(PLUGINS, "").split(os.pathsep) if each]
    os.environ[PLUGINS] = os.pathsep.join(dict.fromkeys([*known, *map(str, places)]))


def load_plugins() -> None:
    """Load the files that the environment names, each once."""
    for text in os.environ.get(PLUGINS, "").split(os.pathsep):
        if text:
            _load_file(_place(Path(text)), PLUGINS)


def _place(path: Path) -> Path:
    return path.expanduser().resolve()


def _load_file(path: Path, field: str) -> None:
    """Import one file under a name of its own; it need not be on the path of Python."""
    name = f"{_MODULE}{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    if name in sys.modules:
        return
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(broken(field, "be a Python file (.py) that exists", str(path)))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    before = Registry.registrations
    try:
        spec.loader.exec_module(module)
        if Registry.registrations == before:
            raise ConfigError(broken(field, "register something, see docs/extending.md", str(path)))
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, FedpromptError) or not isinstance(error, Exception | SystemExit):
            raise
        rule = broken(field, "be a file that can be imported", str(path))
        raise ConfigError(f"{rule}: {type(error).__name__}: {error}") from error
