"""Every error this package raises on purpose.

Each message names what was got and what was wanted, so that it can be acted on without a debugger.
"""


class FlashMoEError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(FlashMoEError, ValueError):
    """A setting cannot be honoured; the message names the setting and the way out."""


class ShapeError(FlashMoEError, ValueError):
    """A tensor's shape, dtype, device, stride or alignment is not what the layer was built for."""


class RoutingError(FlashMoEError, ValueError):
    """The routing is not usable: too many experts for a token, or NaN among its probabilities."""


class RowBoundError(FlashMoEError, RuntimeError):
    """A rank was to receive more rows than the stated bound. Nothing was dropped or is usable."""

    @classmethod
    def of(cls, rank: int, blocks: int, bound: int) -> "RowBoundError":
        """The error of a rank whose buffers hold ``bound`` blocks of 128 rows."""
        return cls(
            f"rank {rank} was to receive {blocks} blocks of 128 rows, but its buffers hold "
            f"{bound}: raise row_bound, or leave it out for exact buffers"
        )


class HeapError(FlashMoEError, MemoryError):
    """The symmetric heap does not fit; the message says how many bytes were asked for."""


class DeviceError(FlashMoEError, RuntimeError):
    """The GPU or the compiled library cannot run the kernel."""


class PeerTimeoutError(FlashMoEError, TimeoutError):
    """A peer did not answer in time; the message names the rank, the peer and what was awaited."""


class LinkError(FlashMoEError, ConnectionError):
    """A link between ranks cannot be made, or broke; the message names the link and the peer."""


class MissingError(FlashMoEError, ModuleNotFoundError):
    """A framework is not installed; the message has the command that installs it."""


def original_of(error: FlashMoEError) -> FlashMoEError:
    """Returns an error as it was first raised, without words that a framework has added.

    Megatron raises an error again for each module that it was building, under a longer message.
    """
    context = error.__context__
    while isinstance(context, FlashMoEError) and str(error).startswith(str(context)):
        error, context = context, context.__context__
    return error


def reason_of(error: Exception) -> str:
    """Returns the words for the other ranks, whose call the error ends, too."""
    return f"{type(error).__name__}: {error}"


def told_error(rank: int, reason: str) -> FlashMoEError:
    """Returns the error that every rank raises after one rank has had an error.

    It is of the same class if that is of this package, else a :class:`FlashMoEError`; ``reason`` is
    from :func:`reason_of`.
    """
    name, _, message = reason.partition(": ")
    kinds = {kind.__name__: kind for kind in (FlashMoEError, *FlashMoEError.__subclasses__())}
    if name in kinds:
        return kinds[name](f"rank {rank}: {message}")
    return FlashMoEError(f"rank {rank}: {reason}")
