"""Provides Triton for tests: on a GPU as it is, otherwise its interpreter, which tests/conftest.py enables."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton has wheels for Linux on x86 alone")
CUDA = torch.cuda.is_available()


def _patch_once() -> None:
    """Patch `triton.language` once a launch, where the interpreter does so again at each call of a device function:
    nearly half of its time.
    """
    from triton import language
    from triton.runtime import interpreter

    patch, patched, of_globals = interpreter._patch_lang, set[int](), dict[int, set[int]]()
    scopes: list[Any] = []

    class Scope:
        def restore(self) -> None:
            patched.clear()
            while scopes:
                scopes.pop().restore()

    def patch_once(function: Any) -> Any:
        values = function.__globals__
        if (modules := of_globals.get(id(values))) is None:
            modules = {id(value) for value in values.values() if value is language or value is language.core}
            of_globals[id(values)] = modules
        if not modules <= patched:
            patched.update(modules)
            scopes.append(patch(function))
        return Scope()  # which only a launch restores, not a device function

    interpreter._patch_lang = patch_once


def _compile_launches() -> None:
    """Compile what the interpreter launches for Hopper, too, as far as Triton's own language: once for each signature.

    The interpreter accepts what the compiler does not, such as arithmetic with None in a branch that is not taken.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction, mangle_type

    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    compiled = set[tuple[Any, ...]]()
    functions: dict[Any, JITFunction[Any]] = {}
    launch = interpreter.InterpretedFunction.run

    @contextmanager
    def compilable() -> Iterator[None]:
        """Modules have their device functions as the compiler takes them."""
        replaced = []
        for name, module in list(sys.modules.items()):
            if name.startswith(("core.kernels.cuda", "triton.language", "tests.")):
                for key, value in list(vars(module).items()):
                    if isinstance(value, interpreter.InterpretedFunction):
                        replaced.append((module, key, value))
                        setattr(module, key, functions.setdefault(value, JITFunction(value.fn)))
        try:
            yield
        finally:
            for module, key, value in replaced:
                setattr(module, key, value)

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        result = launch(self, *arguments, grid=grid, warmup=warmup, **options)
        named = inspect.signature(self.fn).bind(*arguments, **{k: v for k, v in options.items() if k in self.arg_names})
        named.apply_defaults()
        constants = {
            (index,): value for index, (name, value) in enumerate(named.arguments.items())
            if value is None or "constexpr" in str(self.fn.__annotations__.get(name, ""))
        }  # fmt: skip
        signature = {
            name: "constexpr" if (index,) in constants else mangle_type(value)
            for index, (name, value) in enumerate(named.arguments.items())
        }
        key = (self.fn, *signature.items(), *constants.items())
        if key not in compiled:
            compiled.add(key)
            parsed = backend.parse_options({k: v for k, v in options.items() if k not in self.arg_names})
            context = ir.context()
            ir.load_dialects(context)
            backend.load_dialects(context)
            with compilable():
                source = ASTSource(functions[self], signature, constants, {})
                codegen = backend.get_codegen_implementation(parsed)
                source.make_ir(target, parsed, codegen, backend.get_module_map(), context)
        return result

    interpreter.InterpretedFunction.run = run


if not CUDA:
    _patch_once()
    _compile_launches()
