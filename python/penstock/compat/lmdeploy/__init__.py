"""LMDeploy's Python API on Penstock: `from penstock.compat import lmdeploy`."""
