"""Provides Triton for tests: on a GPU as it is, otherwise its interpreter, which tests/conftest.py enables."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from types import FunctionType, ModuleType
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
    scopes: dict[int, dict[str, Any]] = {}
    launch = interpreter.InterpretedFunction.run
    alone = threading.Lock()  # the interpreter replaces Triton's language meanwhile: ranks in threads take turns

    def compilable(value: Any) -> Any:
        """A function, or a module with its functions, as the compiler takes it; what stands in modules stays."""
        if isinstance(value, interpreter.InterpretedFunction):
            if value not in functions:
                function = value.fn
                copy = FunctionType(
                    function.__code__, within(vars(sys.modules[function.__module__])), function.__name__
                )
                functools.update_wrapper(copy, function)
                copy.__defaults__, copy.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
                functions[value] = JITFunction(copy)
            return functions[value]
        if isinstance(value, ModuleType) and value.__name__.startswith("triton.language"):
            copied = ModuleType(value.__name__)
            copied.__dict__.update(within(vars(value)))
            return copied
        return value

    def within(values: dict[str, Any]) -> dict[str, Any]:
        if id(values) not in scopes:
            scope: dict[str, Any] = {}
            scopes[id(values)] = scope
            scope.update((key, compilable(inner)) for key, inner in values.items())
        return scopes[id(values)]

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        with alone:
            launch(self, *arguments, grid=grid, warmup=warmup, **options)
            compile_once(self, arguments, options)

    def compile_once(self: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
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
            source = ASTSource(compilable(self), signature, constants, {})
            codegen = backend.get_codegen_implementation(parsed)
            source.make_ir(target, parsed, codegen, backend.get_module_map(), context)

    interpreter.InterpretedFunction.run = run


def _multiply_in_order() -> None:
    """Sum the products of `tl.dot` in the order of k, each rounded to the accumulator's type.

    The interpreter asks numpy's BLAS, whose order depends on the processor and on the shape, so that on some processors
    a row by itself has other bits than among others. Here what makes them differ is the kernel.
    """
    import numpy as np
    from triton import language
    from triton.runtime import interpreter

    def data(value: Any) -> Any:
        kind = value.dtype.scalar
        if kind.primitive_bitwidth == 8 and kind.is_floating():
            return interpreter._convert_float(value.data, kind, language.float16, None).view(np.float16)
        return value.data

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        x, y, kind = data(a), data(b), d.data.dtype
        if kind.kind == "i":  # exact whatever the order: levels of 8 bits
            total = np.matmul(x.astype(np.float64), y.astype(np.float64)).astype(kind)
        else:
            total, x, y = np.zeros(d.data.shape, kind), x.astype(kind), y.astype(kind)
            part = np.empty_like(total)
            for k in range(x.shape[-1]):
                total += np.multiply(x[..., k, None], y[..., k, None, :], out=part)
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


if not CUDA:
    _patch_once()
    _multiply_in_order()
    _compile_launches()
