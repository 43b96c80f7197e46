"""DashInfer's Python API on Penstock: `from penstock.compat.dashinfer import allspark`.

docs/dashinfer.md describes it.
"""
