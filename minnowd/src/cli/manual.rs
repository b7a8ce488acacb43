//! `minnowd completions` and `minnowd manual`: what shells and `man` know about the command line, made from it.

use std::io;
use std::path::Path;

use clap::Command;
use clap_complete::Shell;

/// A script that completes the command line.
pub(super) fn completions(mut command: Command, shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "minnowd", &mut script);
    script
}

/// Writes a page for the program and one for each command into `folder`, which is made if it is not there.
pub(super) fn write_pages(mut command: Command, folder: &Path) -> io::Result<()> {
    command.build();
    std::fs::create_dir_all(folder)?;
    let mut waiting = vec![command];
    while let Some(command) = waiting.pop() {
        waiting.extend(command.get_subcommands().filter(|command| command.get_name() != "help").cloned());
        let page = clap_mangen::Man::new(command);
        let mut text = Vec::new();
        page.render(&mut text)?;
        std::fs::write(folder.join(page.get_filename()), text)?;
    }
    Ok(())
}
