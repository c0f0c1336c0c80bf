"""Values of ``task=``, and the arguments of tasks."""
