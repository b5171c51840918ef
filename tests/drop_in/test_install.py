"""`install` after torch was imported, and how names change in modules that have them already."""

from __future__ import annotations

from tests.drop_in.conftest import Succeed
from tests.support.programs import Programs


def test_install_reaches_what_was_imported_before(programs: Programs, succeed: Succeed) -> None:
    programs.write(
        """
        from torch.distributed.rpc import RRef, rpc_sync as call
        from torch.distributed import rpc as module

        def is_rref(value):
            return isinstance(value, RRef)
        """,
        "library.py",
    )
    succeed("""
        import library, torch, sys
        import torch.distributed.rpc as before
        from torch.distributed.rpc import get_worker_info
        import zrpc, zrpc.drop_in

        zrpc.drop_in.install()
        zrpc.drop_in.install()
        import torch.distributed.rpc as after
        assert after is before is library.module
        assert library.call is zrpc.rpc_sync is after.rpc_sync is torch.distributed.rpc.api.rpc_sync
        assert get_worker_info is zrpc.get_worker_info
        assert torch.nn.parallel.distributed.RRef is zrpc.RRef
        after.init_rpc("worker0", rank=0, world_size=1)
        assert library.is_rref(after.RRef(3))
        assert library.is_rref(zrpc.remote("worker0", max, args=(1, 2)))
        assert after.api._all_gather(3) == {"worker0": 3}
        after.shutdown()
        assert sys.meta_path[0].__class__.__module__ == "zrpc.drop_in.finder"
    """)


def test_install_says_why_it_is_too_late(succeed: Succeed) -> None:
    succeed("""
        import torch, zrpc.drop_in
        import torch.distributed.rpc as rpc

        def refused():
            try:
                zrpc.drop_in.install()
            except RuntimeError as error:
                return str(error)

        class Options(rpc.RpcBackendOptions):
            pass

        assert "found __main__.Options; call install() earlier" in refused()
        del Options
        import gc; gc.collect()
        rpc.init_rpc("worker0", rank=0, world_size=1)
        assert "torch's RPC is initialized in this process" in refused()
        # A refusal changes nothing.
        assert rpc.rpc_sync("worker0", max, args=(1, 2)) == 2
        assert rpc.rpc_sync.__module__ == "torch.distributed.rpc.api"
        rpc.shutdown()
    """)


def test_scripts_of_torch_compile_beside_it(installed: Succeed) -> None:
    installed("""
        @torch.jit.script
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        class Module(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return double(x)

        assert torch.jit.script(Module())(torch.ones(1)).item() == 2
        import torch.distributed.optim, torch.distributed.fsdp
    """)


def test_an_exception_that_its_args_do_not_fit_is_a_runtime_error(installed: Succeed) -> None:
    installed("""
        class OfTwo(Exception):
            def __init__(self, a, b):
                super().__init__(f"{a} and {b}")

        class Formats(Exception):
            def __init__(self, wanted, have=0):
                super().__init__(f"wanted {wanted}, have {have}")

        def fail(kind):
            raise kind(7, 3)

        rpc.init_rpc("worker0", rank=0, world_size=1)
        error = error_of(rpc.rpc_sync, "worker0", fail, (OfTwo,))
        assert isinstance(error, RuntimeError) and not isinstance(error, OfTwo)
        assert "Original exception on remote side was OfTwo('7 and 3')" in str(error)
        error = error_of(rpc.rpc_sync, "worker0", fail, (Formats,))
        assert isinstance(error, Formats) and str(error) == "wanted 7, have 3"
        rpc.shutdown()
    """)


def test_a_program_for_torch_1_4_runs(installed: Succeed) -> None:
    installed("""
        from datetime import timedelta
        import torch.distributed.autograd as dist_autograd
        from torch.distributed.rpc import ProcessGroupRpcBackendOptions
        from torch.distributed.rpc.backend_registry import BackendType

        error = error_of(rpc.TensorPipeRpcBackendOptions, rpc_timeout=timedelta(seconds=1))
        assert isinstance(error, TypeError)
        assert "incompatible constructor arguments" in str(error)  # as since torch 1.6
        options = ProcessGroupRpcBackendOptions(rpc_timeout=timedelta(seconds=30))
        rpc.init_rpc("worker0", BackendType.PROCESS_GROUP, 0, 1, options)
        assert rpc.get_rpc_timeout() == 30
        rpc._set_rpc_timeout(timedelta(minutes=1))
        assert rpc.rpc_sync("worker0", max, (1, 2), timeout=timedelta(seconds=9)) == 2
        with dist_autograd.context():
            loss = rpc.rpc_sync("worker0", torch.sum, (torch.ones(2, requires_grad=True),))
            dist_autograd.backward([loss])
        rpc.shutdown()
    """)


def test_private_names_that_libraries_use(installed: Succeed) -> None:
    installed("""
        import torch.distributed.autograd as dist_autograd
        from torch._C._distributed_rpc import _is_current_rpc_agent_set
        from torch.distributed.rpc import api, backend_registry, constants, internal, options

        @api._require_initialized
        def name():
            return rpc.get_worker_info().name

        assert str(error_of(name)).startswith("RPC has not been initialized")
        assert not _is_current_rpc_agent_set()
        made = backend_registry.construct_rpc_backend_options(
            rpc.BackendType.TENSORPIPE, rpc_timeout=constants.DEFAULT_RPC_TIMEOUT_SEC
        )
        assert isinstance(made, options.TensorPipeRpcBackendOptions)
        assert isinstance(made, torch._C._distributed_rpc._TensorPipeRpcBackendOptionsBase)
        assert backend_registry.backend_registered("TENSORPIPE")
        assert not backend_registry.backend_registered("GLOO")
        rpc.init_rpc("worker0", backend_registry.BackendType["TENSORPIPE"], 0, 1, made)
        assert name() == "worker0" and _is_current_rpc_agent_set()
        assert api._get_current_rpc_agent().get_worker_info().name == "worker0"
        assert isinstance(api._get_current_rpc_agent(), rpc.TensorPipeAgent)
        with api._wait_all():
            future = rpc.rpc_async("worker0", max, args=(1, 2))
        assert future.done()
        assert isinstance(rpc.RRef(1), torch._C._distributed_rpc.PyRRef)
        assert internal.deserialize(*internal.serialize((torch.ones(2), "x")))[1] == "x"
        assert internal.RPCExecMode.SYNC.value == "sync"
        with dist_autograd.context() as context_id:
            assert dist_autograd._retrieve_context(context_id)._context_id() == context_id
            assert dist_autograd._current_context()._context_id() == context_id
            dist_autograd._is_valid_context(context_id)
        error = error_of(dist_autograd._retrieve_context, context_id)
        assert "Could not find autograd context with id" in str(error)
        error = error_of(dist_autograd._current_context)
        assert "doesn't have a valid autograd context" in str(error)
        rpc.shutdown()
    """)


def test_waits_of_torch_end_with_the_first_error_of_our_futures(installed: Succeed) -> None:
    installed("""
        import threading

        release = threading.Event()

        def run():
            return release.wait(60)

        def waits(wait):
            slow, quick = rpc.rpc_async("worker0", run), rpc.rpc_async("worker0", int, ("x",))
            return isinstance(error_of(wait, [slow, quick]), ValueError) and not slow.done()

        plain = torch.futures.Future()
        plain.set_result(1)
        assert wait_all([plain]) == torch.futures.wait_all([plain]) == [1]
        assert [done.wait() for done in torch.futures.collect_all([plain]).wait()] == [1]
        rpc.init_rpc("worker0", rank=0, world_size=1)
        assert waits(wait_all)
        assert waits(torch.futures.wait_all)
        assert waits(lambda futures: torch.futures.collect_all(futures).wait())
        release.set()
        rpc.shutdown()
    """)
