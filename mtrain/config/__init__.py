"""The configuration: its schema, presets, and how YAML files become a validated `Config`."""
