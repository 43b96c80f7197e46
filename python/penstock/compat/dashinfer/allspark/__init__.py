"""The names of `dashinfer.allspark`."""
