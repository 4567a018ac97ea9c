KNOWN: dict[str, dict[str, tuple[str, ...]]] = {}
