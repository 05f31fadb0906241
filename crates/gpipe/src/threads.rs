//! How many threads share one tensor operation. OpenMP gives each thread that calls operations a
//! team of its own.

/// Lets tensor operations of the calling thread run on this thread alone.
///
/// Call it first on every thread that prepares data or drives a pipeline whose stages have several
/// threads each ([`threads_per_stage`](crate::PipelineBuilder::threads_per_stage)). Without it, such
/// a thread has a team, too. With more threads than processors, OpenMP lets all threads sleep
/// between two operations, also those of the stages. A step of an AmoebaNet on two cores then took
/// 430 ms instead of 290.
pub fn compute_on_this_thread_alone() {
    set(1);
}

/// Lets `count` threads share each tensor operation of the calling thread.
pub(crate) fn set(count: i32) {
    let set = gpipe_bridge::threads::set(count);
    // Only a number below 1 is refused, and every caller has checked its own.
    debug_assert_eq!(set, Ok(()), "{count} threads");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn property_a_number_of_threads_is_the_calling_threads_own() {
        let on_a_thread = |count: Option<i32>| {
            let number = move || {
                count.map_or_else(compute_on_this_thread_alone, set);
                tch::get_num_threads()
            };
            std::thread::spawn(number).join().unwrap()
        };
        set(3);
        assert_eq!([Some(2), None, Some(4), None].map(on_a_thread), [2, 1, 4, 1]);
        assert_eq!(tch::get_num_threads(), 3);
    }
}
