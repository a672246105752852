"""What `--set` means: fields of a config by name, as train.steps=800 or model.g=2."""

from writehead.errors import ConfigError


def read_settings(settings: list[str] | None, rooms: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """The fields that are set and their values as text, by room: "model", "train"."""
    changes: dict[str, dict[str, str]] = {room: {} for room in rooms}
    for setting in settings or []:
        path, equals, value = setting.partition("=")
        room, dot, field = path.partition(".")
        if not (equals and dot and room in changes):
            form = " or ".join(f"{room}.NAME=VALUE" for room in rooms)
            raise ConfigError(f"--set {setting} is not {form}")
        changes[room][field] = value
    return changes
