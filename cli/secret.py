"""``zrpc secret``: creates a secret for a mesh on several hosts."""

from __future__ import annotations

from pathlib import Path

import click

from zrpc.membership.secret import FILE_VARIABLE, new_secret, write_secret


@click.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
def command(file: Path | None) -> None:
    """Create a cluster secret for workers on several hosts.

    Writes it to FILE, a new file with mode 0600, or prints it if no FILE is given. Copy the file
    to each host, readable only by you, and set ZRPC_SECRET_FILE to its path.

    The exit code is 0, or 1 if the file can't be written, or 2 if it exists.
    """
    if file is None:
        click.echo(new_secret())
        return
    try:
        write_secret(file, new_secret())
    except FileExistsError:
        raise click.UsageError(
            f"the file {file} exists already and may be in use: remove it, or name another"
        ) from None
    except OSError as error:
        raise click.ClickException(f"{file} can't be written: {error.strerror}") from error
    click.echo(
        f"wrote {file}: copy it to each host, and set {FILE_VARIABLE}={file} there", err=True
    )
