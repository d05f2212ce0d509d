"""How a PTX instruction becomes a device function: assembly is written here alone."""

import re
from collections.abc import Callable
from typing import Any

from fa2_numba import simulator

SHARED_ALIGNMENT = 1024  # bytes: the 128-byte swizzle repeats after as many


def instruction(
    text: str,
    constraints: str,
    result: str,
    operands: tuple[str, ...],
    stand_in: Callable | None = None,
    volatile: bool = False,
    convergent: bool = False,
) -> Any:
    """A device function that is one PTX instruction on scalars.

    Parameters
    ----------
    text : str
        The instruction, with operands ``$0``, ``$1``, ...: the result first, if there is one.
    constraints : str
        LLVM constraint letters in the same order: f (f32), d (f64), h (16 bit), r (32 bit),
        l (64 bit); that of the result after ``=``.
    result, operands : str
        Names of Numba types; ``"none"`` is no result. Arguments are converted.
    stand_in : callable, optional
        What runs instead under the simulator; where there is none, a call there raises.
    volatile : bool
        Whether it keeps its place among the instructions around it, memory accesses included.
    convergent : bool
        Whether the compiler must not make it depend on more conditions than the source does:
        several threads execute it together.
    """
    if simulator.ACTIVE:
        return stand_in or _absent(_name(text))

    result_type = getattr(types, result)
    outputs = () if result == "none" else (result_type,)
    if volatile:
        constraints = ",".join(filter(None, (constraints, "~{memory}")))

    def codegen(context, builder, signature, args):
        values = cgutils.unpack_tuple(builder, args[0])
        kinds = [context.get_value_type(kind) for kind in outputs]
        made = _assemble(builder, text, constraints, kinds, values, volatile, convergent)
        return made[0] if made else context.get_dummy_value()

    operand_types = [getattr(types, name) for name in operands]
    return _device_function(_name(text), result_type, operand_types, codegen)


def register_instruction(
    text: str, registers: tuple[int, ...], reads: int = 0, operands: tuple[str, ...] = ()
) -> Any:
    """A device function that is one PTX instruction on registers, which are local arrays.

    Its arguments are ``(*arrays, fragment, at, *operands)``, without `fragment` and `at` if
    `reads` is 0. It reads and writes every element of the arrays, and reads
    ``fragment[at : at + reads]`` and the scalars. (Elements of local arrays under constant indices
    are registers.) It is volatile and convergent. As it writes the arrays, the compiler moves no
    use of them across it; so an instruction that waits for registers which the hardware fills
    later, and itself does nothing to them, names them too.

    Parameters
    ----------
    text : str
        The instruction. Its operands are the elements of the arrays, of the fragment, the scalars.
    registers : tuple of int
        How many elements each array has; they are float32 or 32-bit integers.
    reads : int
        How many 32-bit integers of the fragment it reads.
    operands : tuple of str
        Names of Numba's 32-bit and 64-bit integer types.
    """
    if simulator.ACTIVE:
        return _absent(_name(text))

    def codegen(context, builder, signature, args):
        kinds, given = list(signature.args[0]), cgutils.unpack_tuple(builder, args[0])

        def elements(place, first, count):
            array = context.make_array(kinds[place])(context, builder, given[place])
            places = (builder.add(first, first.type(n)) for n in range(count))
            return [builder.gep(array.data, [place]) for place in places]

        start = ir.IntType(64)(0)
        slots = [slot for n, count in enumerate(registers) for slot in elements(n, start, count)]
        scalars, fragment = given[len(registers) :], []
        if reads:
            place = len(registers)
            at = context.cast(builder, given[place + 1], kinds[place + 1], types.int64)
            fragment = [builder.load(slot) for slot in elements(place, at, reads)]
            scalars = scalars[2:]
        before = [builder.load(slot) for slot in slots]
        written = [f"={_letter(value)}" for value in before]
        read = [_letter(value) for value in fragment + scalars]
        tied = [str(n) for n in range(len(before))]  # an element is read and written in one place
        after = _assemble(
            builder,
            text,
            ",".join([*written, *read, *tied, "~{memory}"]),
            [value.type for value in before],
            fragment + scalars + before,
        )
        for slot, value in zip(slots, after, strict=True):
            builder.store(value, slot)
        return context.get_dummy_value()

    arrays = len(registers) + (2 if reads else 0)
    scalars = [getattr(types, name) for name in operands]
    return _device_function(_name(text), types.none, [None] * arrays + scalars, codegen)


def device(function: Callable) -> Any:
    """A Python function of integers that kernels can call, too."""
    if simulator.ACTIVE:
        return function
    from numba import cuda

    return cuda.jit(function, device=True)


def _name(text: str) -> str:
    """The instruction in a text that may prepare its operands, too: the longest name."""
    return max(re.findall(r"[a-z]\w*(?:\.[\w:]+)+", text), key=len)


def _absent(name: str) -> Callable:
    """What is called under the simulator, which has no stand-in for the instruction."""

    def call(*args):
        raise NotImplementedError(f"{name}: needs a GPU with sm_90")

    return call


if simulator.ACTIVE:
    smem_address = _absent("smem_address")
else:
    from llvmlite import ir
    from numba.cuda import cgutils, types
    from numba.cuda.extending import intrinsic

    def _device_function(name, result, operands, codegen):
        """An intrinsic with operands of these types; None is whatever type is given."""

        def emit(typingctx, *given):
            if len(given) == len(operands):
                kinds = [want or have for want, have in zip(operands, given, strict=True)]
                return result(types.StarArgTuple(kinds)), codegen

        emit.__name__ = name  # in the compiler's messages
        return intrinsic(emit)

    def _assemble(builder, text, constraints, outputs, values, volatile=True, convergent=True):
        """The values of the outputs of one assembly text."""
        kind = ir.LiteralStructType(outputs)
        if len(outputs) < 2:
            kind = outputs[0] if outputs else ir.VoidType()
        function = ir.FunctionType(kind, [value.type for value in values])
        assembly = ir.InlineAsm(function, text, constraints, side_effect=volatile)
        call = builder.call(assembly, values, attrs=("convergent",) if convergent else ())
        if len(outputs) < 2:
            return [call] * len(outputs)
        return [builder.extract_value(call, n) for n in range(len(outputs))]

    def _letter(value):
        """The constraint of a register for this value."""
        if isinstance(value.type, ir.FloatType):
            return "f"
        return {32: "r", 64: "l"}[value.type.width]

    def shared_memory(module, alignment):
        """The block's dynamic shared memory in an LLVM module, aligned so, or more if it is."""
        memory = module.globals.get("fa2_smem")
        if memory is None:
            bytes_ = ir.ArrayType(ir.IntType(8), 0)
            memory = ir.GlobalVariable(module, bytes_, "fa2_smem", addrspace=3)
            memory.linkage = "external"
        memory.align = max(memory.align or 1, alignment)
        return memory

    @intrinsic
    def smem_address(typingctx, offset):
        """The 32-bit address of byte `offset` of the block's dynamic shared memory.

        It is the memory that `smem.shared_tile` places its tiles in, here aligned to 1024 bytes.
        """

        def codegen(context, builder, signature, args):
            memory = shared_memory(builder.module, SHARED_ALIGNMENT)
            return builder.add(builder.ptrtoint(memory, ir.IntType(32)), args[0])

        return types.uint32(types.uint32), codegen
