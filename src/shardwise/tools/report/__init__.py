"""The look that plots and pages share."""
