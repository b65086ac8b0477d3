"""Random classes behave with Module as a base as they do without (issue 32).

A program of a seed is a chain of classes with members of many kinds, and probes: calls,
what `inspect` and pickle make of them, patches and what is called after these. It runs
with a plain base and with ``Base = nnx.Module``, and each probe must give
the same. What stands for ``__call__`` is not the function itself and has a frame: that
is all that differs (`docs/look_up/differences.md`), so no probe asks for it.
"""

import abc
import linecache
import os
import random
import re
import sys
import types

import pytest

import graftree as nnx

HEAD = """
import abc, asyncio, contextlib, copy, dataclasses, functools, inspect, pickle, sys
import traceback, typing, warnings

events = {}

def on(f):
    events[f] = f.__name__
    return f

def counting(f):
    @functools.wraps(f)
    def run(*args, **kwargs):
        run.calls += 1
        return f(*args, **kwargs)
    run.calls = 0
    return run

def outside(x):
    return x + 100

def outside_method(self, x):
    return self.n + x

class Descriptor:
    def __set_name__(self, owner, name):
        self.name = name
    def __get__(self, obj, owner=None):
        if obj is None:
            return self
        return lambda x: (self.name, obj.n, x)

class Callable:
    def __call__(self, x):
        return ("called", x)

class Mixin:
    def m1(self, x):
        return ("mixin", x)
    def mixed(self, x):
        return ("mixed", self.m0(x))
    def __call__(self, x):
        inherited = getattr(super(), "__call__", None)
        return ("mixin's call", inherited and inherited(x))

def outcome(f):
    try:
        found = f()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[2:]
        # Objects are made by the metaclass;.
        names = [x.name for x in frames if x.filename in (__file__, "<string>")]
        return type(error).__name__, str(error), names
    return found

def described(f):
    f = getattr(f, "__func__", f)
    return (
        f.__name__, f.__qualname__, f.__doc__, f.__module__ == __name__,
        f.__code__.co_varnames, f.__defaults__, f.__kwdefaults__,
        len(f.__closure__ or ()), f.__globals__ is globals(), sorted(vars(f)),
        inspect.isfunction(f), inspect.isroutine(f), inspect.getfullargspec(f),
        str(inspect.signature(f)), inspect.getsource(f), hasattr(f, "__wrapped__"),
        typing.get_type_hints(f), inspect.isgeneratorfunction(f),
        inspect.iscoroutinefunction(f), inspect.unwrap(f).__code__.co_name,
    )

def warned(f):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f()
    return [(w.filename == __file__, w.lineno) for w in caught]

def depth(obj):
    def deepest(f, low=0):
        try:
            return f(low)
        except RecursionError:
            return None
    return [deepest(lambda _: obj.descend(k)) for k in (10, 600, 100000)]

def through_pickle(x):
    return pickle.loads(pickle.dumps(x)) == x
"""

# Members of a class, each below its name; `{i}` is the number of the class.
MEMBERS = '''
    # m0
    def m0(self, x, k: int = 2, *, s=1):
        """Doubles."""
        return x * k + s + self.n

    # m1
    def m1(self, x):
        return ("m1 of {i}", super().m1(x) if hasattr(super(), "m1") else x)

    # registered
    @on
    def registered(self, x):
        return ("registered {i}", x)

    # counted
    @counting
    def counted(self, x):
        return self.n * x

    # value
    value: typing.Callable = lambda x: x * 3

    # other_value
    other_value: typing.Callable = outside

    # static
    static = staticmethod(outside)

    # bound_later
    bound_later = outside_method

    # instance
    instance = Callable()

    # made
    @classmethod
    def made(cls, n):
        return cls(n).n

    # half
    half = functools.partialmethod(lambda self, a, b: (a, b, self.n), 7)

    # twice
    @property
    def twice(self):
        return self.n * 2

    # lazily
    lazily = Descriptor()

    # dispatched
    @functools.singledispatchmethod
    def dispatched(self, x):
        return ("any", x)
    @dispatched.register
    def _(self, x: int):
        return ("int", x)

    # items
    def items_of(self, k):
        yield from range(k + self.n)

    # later
    async def later(self, x):
        return x + self.n

    # descend
    def descend(self, k):
        return 0 if k == 0 else 1 + self.descend(k - 1)

    # frames
    def frames(self, k):
        return [sys._getframe(i).f_code.co_name for i in range(k)]
    def called_by(self):
        return self.frames(3)

    # warns
    def warns(self):
        warnings.warn("old", DeprecationWarning, stacklevel=2)

    # fails
    def fails(self, x):
        raise ValueError(x, self.n)

    # call
    def __call__(self, x, flag=False):
        if flag:
            return self.fails(x) if hasattr(self, "fails") else 1 // 0
        return ("call of {i}", x, self.n)

    # super_call
    def __call__(self, x):
        inherited = getattr(super(), "__call__", None)
        return ("{i}", inherited(x) if inherited else x)

    # alias_call
    def forward(self, x, scale=3):
        return x * scale + self.n
    __call__ = forward

    # partial_call
    def go(self, k, x):
        return ("go", k, x, self.n)
    __call__ = functools.partialmethod(go, 5)

    # recursive_call
    def __call__(self, x):
        return x if x <= 0 else self(x - 1)

    # generator_call
    def __call__(self, k):
        yield from range(k)

    # static_call
    __call__ = staticmethod(outside)

    # registered_call
    @counting
    def __call__(self, x):
        return ("counted call", x)
'''
MEMBERS = dict(member.split("\n", 1) for member in MEMBERS.split("    # ")[1:])

# For the members that a class has, what is asked; `C` is the class, `o` an object.
PROBES = {
    "m0": [
        "o.m0(2)", "C.m0(o, 3, k=1)", "described(C.m0)", "described(o.m0)", "o.m0()",
        "o.m0.__self__ is o", "through_pickle(o.m0.__func__)", "C.m0 is o.m0.__func__",
        "copy.deepcopy(C.m0) is C.m0", "type(C.m0).__name__",
    ],
    "m1": ["o.m1(1)", "described(C.m1)"],
    "registered": [
        "events.get(C.registered)", "o.registered(4)", "C.registered in events"
    ],
    "counted": ["o.counted(3), C.counted.calls", "C.counted.__wrapped__.__name__"],
    "value": ["C.value(5)", "type(vars(C).get('value')).__name__", "o.value()"],
    "other_value": ["C.other_value is outside", "through_pickle(C.other_value)"],
    "static": ["o.static(1)", "C.static is outside"],
    "bound_later": ["o.bound_later(1)", "C.bound_later is outside_method"],
    "instance": ["o.instance(2)", "C.instance(3)"],
    "made": ["C.made(9)", "o.made(8)"],
    "half": ["o.half(2)", "C.half(o, 3)"],
    "twice": ["o.twice", "C.twice.fget(o)"],
    "lazily": ["o.lazily(1)", "C.lazily.name"],
    "dispatched": ["o.dispatched(1)", "o.dispatched('a')"],
    "items": ["[*o.items_of(2)]", "described(C.items_of)"],
    "later": ["asyncio.run(o.later(1))", "described(C.later)"],
    "descend": ["depth(o)"],
    "frames": ["o.called_by()", "C.called_by(o)"],
    "warns": ["warned(lambda: o.warns())", "warned(lambda: C.warns(o))"],
    "fails": ["o.fails(3)", "C.fails(o, 4)", "C.fails(1)"],
    "call": [
        "o(1)", "o.__call__(2)", "C.__call__(o, 3)", "o(1, flag=True)", "o(typo=1)",
        "C.__call__()", "inspect.signature(o) == inspect.signature(o.__call__)",
        "described(C.__call__)", "described(o.__call__)", "callable(o)",
        "'flag' in o.__call__.__code__.co_varnames", "o.__call__.__self__ is o",
        "pickle.loads(pickle.dumps(C.__call__))(o, 4)",
        "C.__call__ is C.__call__", "repr(C.__call__).split(' at ')[0]",
        "vars(copy.copy(o.__call__.__func__))",
    ],
    "super_call": ["o(1)", "described(C.__call__)", "C.__call__(o, 2)"],
    "alias_call": ["o(2)", "described(C.__call__)", "described(C.forward)",
                   "pickle.loads(pickle.dumps(C.__call__)) is C.forward"],
    "partial_call": ["o(2)", "o.__call__(3)", "C.__call__(o, 4)"],
    "recursive_call": ["o(5)", "o(90)"],
    "generator_call": ["[*o(3)]", "inspect.isgeneratorfunction(C.__call__)"],
    "static_call": ["o(3)", "C.__call__(4)", "C.__call__ is outside"],
    "registered_call": ["o(1), C.__call__.calls", "described(C.__call__)"],
}  # fmt: skip

# What changes the class between probes.
PATCHES = {
    "m0": [
        "C.m0.__defaults__ = (7,)", "C.m0.__kwdefaults__ = {'s': 50}",
        "C.m0.note = 'new'", "C.m0 = lambda self, x: ('patched', x)",
        "C.m0.__code__ = C.other.__code__",
    ],
    "m1": ["C.m1 = outside_method", "del C.m1"],
    "call": [
        "C.__call__.__defaults__ = (True,)", "C.__call__.note = 'new'",
        "C.__call__.__code__ = C.other.__code__", "C.__call__.__doc__ = 'Said.'",
        "C.__call__ = C.other", "del C.__call__", "del C.__call__.note",
        "before = C.__call__; C.__call__ = lambda self, x: ('around', before(self, x))",
    ],
    "alias_call": ["C.forward.__defaults__ = (11,)", "C.__call__.__defaults__ = (12,)"],
    "registered_call": ["C.__call__.calls = 40"],
}  # fmt: skip

OTHER = """
    def other(self, x, flag=False):
        return ("other", x, flag)
"""


class Program:
    """The classes and probes of a seed."""

    def __init__(self, seed: int) -> None:
        choose = random.Random(seed)
        self.lines, self.probes = [HEAD], []
        base, has, mixed = "Base", set(), choose.randint(0, 9)
        for i in range(choose.randint(1, 3)):
            kinds = choose.sample([*MEMBERS], choose.randint(2, 7))
            calls = [kind for kind in kinds if kind.endswith("call")]
            kinds = [kind for kind in kinds if kind not in calls[1:]]
            has = {kind for kind in has if not (calls and kind.endswith("call"))}
            has |= {*kinds}
            bases = f"Mixin, {base}" if i == mixed else base
            if choose.random() < 0.2:
                self.lines.append("@dataclasses.dataclass(eq=False, repr=False)")
            self.lines.append(f"class C{i}({bases}):")
            if i == 0:
                self.lines.append("    n: int = 3")
                self.lines.append("    def __init__(self, n=3): self.n = n")
            self.lines.append(OTHER)
            self.lines += [MEMBERS[kind].replace("{i}", str(i)) for kind in kinds]
            base = f"C{i}"
        self.lines.append(f"C, o = {base}, {base}()")
        for _ in range(choose.randint(5, 15)):
            kind = choose.choice(sorted(has))
            if choose.random() < 0.15 and kind in PATCHES:
                self.probes.append((choose.choice(PATCHES[kind]), "exec"))
            else:
                self.probes.append((choose.choice(PROBES[kind]), "eval"))

    def run(self, name: str, base: type) -> list[object]:
        """What the probes give if the classes have this base."""
        source, file = "\n".join(self.lines), f"<{name}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        module = types.ModuleType(name)
        module.__dict__.update(Base=base, __file__=file)
        sys.modules[name] = module
        try:
            exec(compile(source, file, "exec"), vars(module))
            return [self._ask(module, *probe) for probe in self.probes]
        finally:
            del sys.modules[name], linecache.cache[file]

    @staticmethod
    def _ask(module: types.ModuleType, text: str, mode: str) -> str:
        code = compile(text, module.__file__, mode)
        found = module.outcome(lambda: eval(code, vars(module)))
        address = r"0x[0-9a-f]+"
        return re.sub(address, "", repr(found).replace(module.__name__, "module"))


class Meta(abc.ABCMeta):
    """As that of Modules, it says what a call of a class does."""

    def __call__(cls, *args: object, **kwargs: object) -> object:
        return super().__call__(*args, **kwargs)


class Plain(metaclass=Meta):
    """What a class is without Module."""


COUNT = 5000 if os.environ.get("TEST_ALL") else 300


@pytest.mark.parametrize("part", range(10))
def test_classes_behave_as_without_module(part):
    for seed in range(part * COUNT // 10, (part + 1) * COUNT // 10):
        program = Program(seed)
        plain = program.run("plain_classes", Plain)
        ours = program.run("module_classes", nnx.Module)
        for (text, _), wanted, found in zip(program.probes, plain, ours, strict=True):
            assert found == wanted, f"seed {seed}: {text}\n{program.lines[1:]}"
