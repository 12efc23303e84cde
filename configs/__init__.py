"""YAML configurations shipped with the package."""
