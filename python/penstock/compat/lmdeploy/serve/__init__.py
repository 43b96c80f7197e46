"""`lmdeploy.serve`: the asynchronous engine. Penstock's command line has no server with LMDeploy's routes."""
