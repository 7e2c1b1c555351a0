"""The command `natgrad`: models, data, recipes, training and reports."""
