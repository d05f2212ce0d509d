"""The package for other libraries, in their own ways of calling and differentiating."""
