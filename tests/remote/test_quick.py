from skyenv.remote.client import connect


async def test_a_sandbox_runs_commands_and_keeps_files() -> None:
    async with connect() as client, client.sandbox() as box:
        result = await box.exec("cd /tmp && echo hello")
        assert (result.exit_code, result.output, result.cwd) == (0, "hello\n", "/tmp")
        await box.write_file("/tmp/x", b"\xff\x00")
        assert await box.read_file("/tmp/x") == b"\xff\x00"
        async with box.fork() as twin:
            assert await twin.read_file("/tmp/x") == b"\xff\x00"
