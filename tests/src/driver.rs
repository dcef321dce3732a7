//! The driver by its name.

/// The release in the first line of `/proc/driver/nvidia/version`, such as 580.65.06: the first word that is numbers and points.
pub fn release(line: &str) -> Option<&str> {
    line.split_whitespace().find(|word| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.'))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_driver_is_named_by_its_release() {
        let line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)\n";
        assert_eq!(super::release(line), Some("580.65.06"));
        assert_eq!(super::release(""), None);
    }
}
